//! This test program, started again: for tests that need another process, or one of their own.

use std::ffi::OsString;
use std::process::Command;

/// A command that runs `test` of this program, and nothing else. `prefix` is what starts it, such as `setpriv`
/// and its arguments. `test` is the name that libtest has, modules included.
pub fn again(prefix: &[&str], test: &str) -> Command {
    let program = std::env::current_exe().expect("/proc is mounted");
    let mut words: Vec<OsString> = prefix.iter().map(OsString::from).collect();
    words.push(program.into());
    let flags = [test, "--exact", "--include-ignored", "--nocapture", "--test-threads=1"];
    words.extend(flags.map(OsString::from));
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]);
    command
}
