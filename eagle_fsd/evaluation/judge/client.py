"""Send requests to a judge."""

from __future__ import annotations

from eagle_fsd.evaluation.judge.prompts import JudgeError, Prompt
from eagle_fsd.utils.chat_api import ChatClient, Endpoint, EndpointError

#: Maximum length of a judgment in tokens, as in FastChat.
MAX_TOKENS = 2048

#: The judge's endpoint.
JudgeEndpoint = Endpoint


class JudgeClient:
    """A client of one judge. It is thread-safe.

    Args:
        endpoint: The judge's endpoint.

    Raises:
        JudgeError: The package ``openai`` is not installed, or the URL is invalid.
    """

    def __init__(self, endpoint: JudgeEndpoint) -> None:
        self.endpoint = endpoint
        try:
            self._client = ChatClient(endpoint)
        except EndpointError as error:
            raise self._failure(error) from error

    def ask(self, prompt: Prompt) -> str:
        """Request one judgment, decoded greedily.

        Args:
            prompt: The messages to send.

        Returns:
            The judge's reply; "" if it has no content.

        Raises:
            JudgeError: The endpoint cannot be reached or rejects the request.
        """
        messages = [
            {"role": "system", "content": prompt.system},
            {"role": "user", "content": prompt.user},
        ]
        try:
            return self._client.complete(messages, temperature=0, max_tokens=MAX_TOKENS)
        except EndpointError as error:
            raise self._failure(error) from error

    def _failure(self, error: EndpointError) -> JudgeError:
        return JudgeError(
            f"the judge {self.endpoint.model} at {self.endpoint.redacted_url} failed ({error});"
            " answers and judgments so far are saved: run the same command again to resume"
        )
