"""python -m unisono"""

from unisono.cli.main import program

program()
