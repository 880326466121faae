from twostep.engine.llm import LLM as LLM
from twostep.engine.params import SamplingParams as SamplingParams
from twostep.engine.structured import StructuredOutput as StructuredOutput
