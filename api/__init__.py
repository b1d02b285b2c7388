"""The management API: ``create_app`` gives a FastAPI application around a ServiceView."""

from api.app import create_app

__all__ = ["create_app"]
