"""Settings of the judge of evaluations."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import Field, field_validator

from vlm_pg.settings import Settings


class EvalJudgeSettings(Settings):
    """Section ``eval.judge``: a language model behind an OpenAI-compatible URL, asked about outputs that the rules
    could not read and texts that they call wrong. Figures of the rules stay; those with the judge stand beside them."""

    url: str | None = Field(
        None, description="Base URL with its version, for example http://127.0.0.1:8000/v1; null: no judge."
    )
    model: str | None = Field(None, description="Model name the server knows; default: the first one it lists.")
    api_key_variable: str = Field(
        "OPENAI_API_KEY",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="Environment variable with the key, sent as bearer token; the key is never stored.",
    )
    timeout_seconds: float = Field(120.0, gt=0.0, description="Longest wait for one decision; then there is none.")
    retries: int = Field(2, ge=0, description="Times a request that failed is sent again.")
    concurrency: int = Field(16, ge=1, description="Requests in flight at a time.")
    max_output_characters: int = Field(
        20_000, ge=100, description="Longest output that is shown to the judge; longer ones are counted as undecided."
    )

    @field_validator("url")
    @classmethod
    def _is_a_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if not value.startswith(("http://", "https://")):
            raise ValueError(
                f"is {value!r}. The base URL of an OpenAI-compatible server is expected, for example "
                "http://127.0.0.1:8000/v1. Correct it, or set eval.judge.url=null for no judge."
            )
        if "@" in urlsplit(value).netloc:
            raise ValueError(
                "has a name or a password in it, which results would show. Leave them out, and put the key into the "
                "environment variable that eval.judge.api_key_variable names."
            )
        return value
