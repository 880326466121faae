from twostep.config.configs import EngineConfig as EngineConfig
from twostep.engine.outputs import Delta as Delta
from twostep.engine.outputs import RequestOutput as RequestOutput
from twostep.engine.params import SamplingParams as SamplingParams
from twostep.engine.text.structured_output import StructuredOutput as StructuredOutput
from twostep.llm import LLM as LLM

__all__ = ["LLM", "Delta", "EngineConfig", "RequestOutput", "SamplingParams", "StructuredOutput"]
__version__: str
