"""The application's own tables and sessions."""

from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """What all tables of the application share."""

    metadata = MetaData()


class Order(Base):
    """An order; its receipt is written by a job."""

    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]
    cents: Mapped[int]
    receipt: Mapped[str | None]


def open_sessions(database_url: str) -> async_sessionmaker[AsyncSession]:
    """Return a factory of sessions on a database, ``postgresql://…``."""
    engine = create_async_engine(database_url.replace("postgresql://", "postgresql+psycopg://", 1))
    return async_sessionmaker(engine, expire_on_commit=False)
