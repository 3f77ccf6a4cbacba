"""How one model is spread over devices: one small file per strategy."""
