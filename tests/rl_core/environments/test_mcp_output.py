"""Invalid lines on an MCP server's standard output, as the official package logs them; it need not be installed."""

import logging

import pytest

from rl_core.environments import mcp_tools


@pytest.fixture
def client_logger(monkeypatch):
    monkeypatch.setattr(mcp_tools, "_noisy_servers", set())
    logger = logging.getLogger(mcp_tools._CLIENT_LOGGER)
    logger.addFilter(mcp_tools._report_invalid_output_once)
    yield logger
    logger.removeFilter(mcp_tools._report_invalid_output_once)


def test_one_warning_for_each_server_and_other_messages_stay(client_logger, caplog):
    for name in ("files", "files", "search", "files"):
        mcp_tools._server_name.set(name)
        client_logger.error("Failed to parse JSONRPC message from server")
    client_logger.warning("MCP server process 7 is still alive")
    texts = [record.getMessage() for record in caplog.records]
    assert [text.partition(" writes")[0] for text in texts] == [
        "MCP server 'files'",
        "MCP server 'search'",
        "MCP server process 7 is still alive",
    ]
