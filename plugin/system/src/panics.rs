//! What a panic does to the process.
//!
//! A panic is a bug, and a plugin that lost one of its threads would still answer its probes. So every panic ends
//! the process and kubelet starts it again, except in [`caught`]: redb panics on some damaged files.

use std::any::Any;
use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::process;

thread_local! {
    /// How many calls of [`caught`] this thread is in.
    static CATCHING: Cell<u32> = const { Cell::new(0) };
}

/// From now on a panic outside [`caught`] aborts the process once its message is printed.
pub fn end_the_process() {
    let print = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        print(info);
        if CATCHING.get() == 0 {
            process::abort();
        }
    }));
}

/// What `work` returns. What it leaves half changed when it panics is for the caller to drop.
pub fn caught<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    CATCHING.set(CATCHING.get() + 1);
    let result = panic::catch_unwind(AssertUnwindSafe(work));
    CATCHING.set(CATCHING.get() - 1);
    result.map_err(|payload| message(payload.as_ref()))
}

fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    text.or(payload.downcast_ref::<&str>().copied()).unwrap_or("no message").to_owned()
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use super::*;

    #[test]
    fn what_panics_is_caught_with_its_message() {
        assert_eq!(caught(|| 3), Ok(3));
        assert_eq!(caught(|| panic!("as it is")), Err::<(), _>("as it is".to_owned()));
        let nested = caught(|| {
            let inner = caught(|| panic!("number {}", 1));
            assert_eq!(inner, Err::<(), _>("number 1".to_owned()));
            panic!("{}", 2)
        });
        assert_eq!(nested, Err::<(), _>("2".to_owned()));
    }

    /// The child of the test below.
    #[test]
    fn process() {
        let Ok(role) = std::env::var("TESSERA_TEST_PANIC") else { return };
        end_the_process();
        assert!(caught(|| panic!("caught")).is_err());
        let thread = match role.as_str() {
            "caught" => std::thread::spawn(|| assert!(caught(|| panic!("caught")).is_err())),
            _ => std::thread::spawn(|| panic!("not caught")),
        };
        let _ = thread.join();
        process::exit(7);
    }

    #[test]
    fn a_panic_of_any_thread_ends_the_process_unless_it_is_caught() {
        let run = |role| {
            let mut child = Command::new(std::env::current_exe().unwrap());
            child.args(["--exact", "panics::tests::process", "--nocapture"]);
            child.env("TESSERA_TEST_PANIC", role).output().unwrap()
        };
        let caught = run("caught");
        assert_eq!(caught.status.code(), Some(7), "{caught:?}");
        let not = run("not");
        assert_eq!(not.status.signal(), Some(nix::libc::SIGABRT), "{not:?}");
        assert!(String::from_utf8_lossy(&not.stderr).contains("not caught"), "{not:?}");
    }
}
