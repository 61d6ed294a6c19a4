from support.planned import planned

__all__ = ["planned"]
