//! What users are given, as it was built: `tessera run`, the demo, the chart, the image and the suite for real
//! GPUs.

mod chart;
mod gpu_suite;
mod run;
mod sandbox;

use std::process::Output;
use std::time::{Duration, Instant};

use tessera_harness::PATIENCE;

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// All that a program printed.
fn said(output: &Output) -> String {
    text(&output.stdout) + &text(&output.stderr)
}

/// That a command ended with this exit status, and said all of this.
fn ends(output: &Output, code: i32, says: &[&str]) {
    let said = said(output);
    assert_eq!(output.status.code(), Some(code), "{said}");
    for part in says {
        assert!(said.contains(part), "without \"{part}\": {said}");
    }
}

/// Looks again and again until something is found.
fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
