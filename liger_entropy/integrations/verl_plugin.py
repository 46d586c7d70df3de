"""Importing this module is ``apply_to_verl()``: for VERL_USE_EXTERNAL_MODULES, which verl imports in every worker."""

from .verl import apply_to_verl

apply_to_verl()
