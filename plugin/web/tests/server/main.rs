//! The API as a client sees it: a server on a port and on a socket, over a source that the test scripts, with an API
//! server beside it.

mod common;
mod hostile;
mod plain;
mod reviews;
mod rights;
mod schema;
mod world;
