from twostep.engine.llm import LLM as LLM
from twostep.engine.params import SamplingParams as SamplingParams
