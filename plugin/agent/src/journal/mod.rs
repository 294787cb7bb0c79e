//! The durable side: the ledger's one writer and the audit trail.

mod audit;

use std::sync::Arc;

use tessera_store::{Commits, Ledger, Listener};
use tessera_system::locks::{Ranked, RankedGuard};

use crate::lock_order::{LEAF, WRITER};

#[derive(Debug)]
pub struct Journal {
    writer: Ranked<Writer>,
    /// Lines of the audit trail that are drawn together.
    pending: Ranked<audit::Pending>,
    commits: Arc<Commits>,
}

/// What only one thread changes at a time.
#[derive(Debug)]
pub(crate) struct Writer {
    pub ledger: Ledger,
    /// Of the newest allocation.
    pub generation: u64,
}

impl Journal {
    /// Over a ledger whose newest allocation has this generation.
    pub(crate) fn new(ledger: Ledger, generation: u64) -> Self {
        let commits = ledger.commits();
        Journal {
            writer: Ranked::new(WRITER, Writer { ledger, generation }),
            pending: Ranked::new(LEAF, audit::Pending::default()),
            commits,
        }
    }

    /// The writer. Its holder may wait for the disk: only on blocking threads.
    pub(crate) fn writer(&self) -> RankedGuard<'_, Writer> {
        self.writer.lock()
    }

    pub fn commits(&self) -> &Commits {
        &self.commits
    }

    /// From now on `listener` is given each line of the audit trail that is written; `None`: nobody is.
    /// Blocking.
    pub fn set_listener(&self, listener: Option<Listener>) {
        self.writer().ledger.set_listener(listener);
    }

    /// Writes what is kept back, and lets go of the file for the next plugin. Blocking.
    pub(crate) fn close(&self) {
        self.finish_audit();
        self.writer().ledger.close();
    }
}
