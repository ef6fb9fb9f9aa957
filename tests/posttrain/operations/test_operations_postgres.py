"""`--database postgresql://...` against a real PostgreSQL that the test starts."""

from __future__ import annotations

import pytest
from helpers.postgres import find_postgres_problem, postgres

from posttrain.operations.database import prepare_databases
from rl_core.errors import BackendError, SettingsError

pytestmark = pytest.mark.skipif(bool(find_postgres_problem()), reason=find_postgres_problem())


@pytest.fixture(scope="module")
def server():
    with postgres() as address:
        yield address


def list_databases(server: str) -> set[str]:
    import psycopg2

    connection = psycopg2.connect(f"postgresql://{server}/postgres")
    with connection, connection.cursor() as cursor:
        cursor.execute("select datname from pg_database")
        names = {row[0] for row in cursor.fetchall()}
    connection.close()
    return names


def test_both_databases_are_created_once(server):
    addresses = prepare_databases(f"postgresql://{server}/team")
    assert addresses.prefect == f"postgresql+asyncpg://{server}/team_prefect"
    assert addresses.mlflow == f"postgresql+psycopg2://{server}/team_mlflow"
    assert {"team_prefect", "team_mlflow"} <= list_databases(server)
    assert prepare_databases(f"postgresql://{server}/team") == addresses  # they exist already


def test_the_addresses_work_with_the_servers_drivers(server):
    import asyncio

    import sqlalchemy
    from sqlalchemy.ext.asyncio import create_async_engine

    addresses = prepare_databases(f"postgresql://{server}/team?sslmode=disable")
    with sqlalchemy.create_engine(addresses.mlflow).connect() as connection:
        assert (
            connection.execute(sqlalchemy.text("select current_database()")).scalar()
            == "team_mlflow"
        )

    async def query_database():
        engine = create_async_engine(addresses.prefect)
        async with engine.connect() as connection:
            name = (await connection.execute(sqlalchemy.text("select current_database()"))).scalar()
        await engine.dispose()
        return name

    assert asyncio.run(query_database()) == "team_prefect"


def test_wrong_password_is_reported_but_not_shown(server):
    with pytest.raises(SettingsError, match="refuses the login") as raised:
        prepare_databases(f"postgresql://team:wrong-secret@{server.rpartition('@')[2]}/team")
    assert "wrong-secret" not in str(raised.value) and "check user and password" in str(
        raised.value
    )


def test_missing_privilege_names_the_command(server):
    import psycopg2

    connection = psycopg2.connect(f"postgresql://{server}/postgres")
    connection.autocommit = True
    connection.cursor().execute("create role guest login password 'guest'")
    connection.close()
    with pytest.raises(
        SettingsError, match=r'permission denied .* create database "other_prefect" owner "guest"'
    ):
        prepare_databases(f"postgresql://guest:guest@{server.rpartition('@')[2]}/other")


def test_unreachable_database():
    with pytest.raises(
        BackendError,
        match=r"PostgreSQL at 127\.0\.0\.1:9 does not answer.*pg_isready -h 127\.0\.0\.1 -p 9",
    ):
        prepare_databases("postgresql://team@127.0.0.1:9/team")
