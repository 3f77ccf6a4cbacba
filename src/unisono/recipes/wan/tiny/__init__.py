"""The tiny Wan: small real models, drawn data and a judge, with nothing downloaded."""
