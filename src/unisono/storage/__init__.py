"""Files in object storage, by fsspec: their addresses, and the calls that read, write and delete them."""
