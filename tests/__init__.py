"""Tests; they mirror the folders of the package."""
