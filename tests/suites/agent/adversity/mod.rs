//! What fails, is in the way, or means harm.

mod corpus;
mod failures;
mod foreign_plugins;
mod hostile;
mod hung_driver;
mod lost_paths;
mod restarts;
mod rights;
mod second_plugin;
mod wedged;
