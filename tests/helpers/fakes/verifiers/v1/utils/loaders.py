import importlib

from verifiers.v1 import Env, SingleAgentEnv, Taskset, TasksetConfig


def concrete_type(cls, base, origin=None):
    return getattr(cls, "config_class", None)


def _exported(name, base):
    module = importlib.import_module(name)
    exported = [getattr(module, each) for each in module.__all__]
    return next((each for each in exported if issubclass(each, base)), None)


def taskset_class(name):
    return _exported(name, Taskset)


def environment_class(taskset, name=""):
    if name:
        return _exported(name, Env)
    return (_exported(taskset, Env) if taskset else None) or SingleAgentEnv


__all__ = ["Taskset", "TasksetConfig", "concrete_type", "environment_class", "taskset_class"]
