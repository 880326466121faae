from twostep.config.configs import EngineConfig as EngineConfig
from twostep.engine.collector import Delta as Delta
from twostep.engine.llm import LLM as LLM
from twostep.engine.outputs import RequestOutput as RequestOutput
from twostep.engine.params import SamplingParams as SamplingParams
from twostep.engine.structured import StructuredOutput as StructuredOutput

__all__ = ["LLM", "Delta", "EngineConfig", "RequestOutput", "SamplingParams", "StructuredOutput"]
__version__: str
