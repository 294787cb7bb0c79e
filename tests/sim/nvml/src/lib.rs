//! simnvml.
