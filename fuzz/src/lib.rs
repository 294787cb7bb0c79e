//! What every reader of foreign bytes must do with *any* bytes: not panic, not hang, not grow, and
//! believe nothing that cannot be true. `cargo fuzz` feeds these functions; `tests/suites/agent/adversity/corpus.rs`
//! replays what it kept, with the stable compiler, in `make test`.

mod config;
mod http2;
mod ledger;
mod pages;
mod patch;
mod session;

pub use config::config;
pub use http2::http2;
pub use ledger::{damaged as damaged_ledger, ledger};
pub use pages::{quota_page, usage_file, usage_page};
pub use session::session;

/// What is done with an input.
pub type Check = fn(&[u8]);

/// Every target, by the name of its corpus.
pub const TARGETS: &[(&str, Check)] = &[
    ("usage_page", usage_page),
    ("usage_file", usage_file),
    ("quota_page", quota_page),
    ("session", session),
    ("http2", http2),
    ("config", config),
    ("ledger", ledger),
];
