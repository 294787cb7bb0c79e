//! What an administrator changes, and the commands for it.

mod admin_authority;
mod command_line;
mod names;
mod night;
mod path_kinds;
mod reload;
mod reload_process;
mod steer;
mod top;
mod unreachable;
