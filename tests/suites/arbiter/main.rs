//! The arbiter's thread beside scripted tenants on `gate.sock`: good ones, dead ones, stopped ones,
//! liars, floods. There is no GPU and no shim here: what is tried is who is let in when.

mod failing;
mod fair;
mod hostile;
mod process;
mod several;
mod words;
