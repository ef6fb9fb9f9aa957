class AgentConfig:
    pass
