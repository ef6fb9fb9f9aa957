import importlib

from verifiers.v1 import Taskset, TasksetConfig


def concrete_type(cls, base, origin=None):
    return getattr(cls, "config_class", None)


def taskset_class(name):
    module = importlib.import_module(name)
    return getattr(module, module.__all__[0])


__all__ = ["Taskset", "TasksetConfig", "concrete_type", "taskset_class"]
