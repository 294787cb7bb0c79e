//! What was: figures of tenants and GPUs in buckets of time, bounded, crash-safe, off the hot path.
//!
//! **For**: folding looks into buckets of 10 s, 5 min and 1 h, and their storage in a redb database of their own.
//!
//! **May use**: the view. **Must not**: know the agent; it is handed what the node looks like.
#![forbid(unsafe_code)]

mod fold;
mod query;
mod row;
mod store;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use fold::{Folder, Pending};
use query::Known;
use redb::Database;
use row::Cell;
use store::{Bucket, Store};
use tessera_system::locks::lock;
use tessera_system::panics;
use tessera_view::SourceError;
use tessera_view::history::{Answer, Query};
use tessera_view::node::Node;
use tessera_view::status::Status;

pub use query::{Key, Series};
pub use store::{FlushError, Found, Options};

pub fn beside(ledger: &Path) -> PathBuf {
    ledger.with_file_name("history.redb")
}

/// Records what it is handed and answers from it. All but [`History::look`] is blocking.
pub struct History {
    options: Mutex<Options>,
    folder: Mutex<Folder>,
    writer: Mutex<Writer>,
    /// To read from, while there is a file.
    db: Mutex<Option<Arc<Database>>>,
}

#[derive(Default)]
struct Writer {
    /// With what it was opened with.
    store: Option<(Store, Options)>,
    closed: bool,
}

impl History {
    /// Of a file that [`History::flush`] opens.
    pub fn new(options: Options) -> Self {
        History {
            options: Mutex::new(options),
            folder: Mutex::default(),
            writer: Mutex::default(),
            db: Mutex::default(),
        }
    }

    /// From the next flush on.
    pub fn set_options(&self, options: Options) {
        *lock(&self.options) = options;
    }

    /// Adds what happened since the look before. It does not wait for the disk.
    /// The usage pages of `unread` could not be read; `monotonic_ms` is of a clock that is never set.
    pub fn look(&self, status: &Status, unread: &HashSet<String>, monotonic_ms: u64) {
        lock(&self.folder).look(status, unread, monotonic_ms);
    }

    /// Tenants by id and generation that are gone, wait to be stored, and were never named: a pod that lives for a few
    /// seconds is named after the last look at it, if at all.
    pub fn nameless(&self) -> BTreeSet<(String, u64)> {
        lock(&self.folder).nameless()
    }

    /// Names such tenants. GPUs of the keys do not matter.
    pub fn name(&self, named: &[Series]) {
        let mut folder = lock(&self.folder);
        named.iter().for_each(|series| folder.name(series));
    }

    /// Stores every bucket that is full; with `all`, also the one that is being filled. How the file was found is
    /// returned where it had to be opened.
    pub fn flush(&self, all: bool) -> Result<Option<Found>, FlushError> {
        let mut writer = lock(&self.writer);
        if writer.closed {
            return Ok(None);
        }
        let found = self.opened(&mut writer)?;
        let Some((store, options)) = &mut writer.store else { return Ok(found) };
        let (pending, buckets, now) = {
            let mut folder = lock(&self.folder);
            let pending = folder.take(all);
            let buckets = buckets(&folder, &pending);
            (pending, buckets, folder.looked())
        };
        let path = options.path.clone();
        let written = store::has_room(&path).and_then(|()| {
            panics::caught(|| store.add(&buckets, now).map_err(|error| error.to_string()))?
        });
        match written {
            Ok(()) => {
                lock(&self.folder).forget();
                Ok(found)
            }
            Err(error) => {
                lock(&self.folder).give_back(pending);
                self.let_go(&mut writer);
                Err(FlushError::Unwritten { path, error })
            }
        }
    }

    fn opened(&self, writer: &mut Writer) -> Result<Option<Found>, FlushError> {
        let options = lock(&self.options).clone();
        if let Some((store, opened)) = &writer.store
            && *opened == options
            // Without its name, nobody would ever find what is written.
            && store.is_at(&options.path)
        {
            return Ok(None);
        }
        self.let_go(writer);
        let (store, found) = store::open(&options)?;
        *lock(&self.db) = Some(store.db());
        writer.store = Some((store, options));
        Ok(Some(found))
    }

    fn let_go(&self, writer: &mut Writer) {
        let db = lock(&self.db).take();
        let store = writer.store.take();
        // Closing writes to the file, too.
        let _ = panics::caught(|| drop((db, store)));
    }

    /// Stores all, and lets go of the file for the next plugin. Nothing is stored after that.
    pub fn close(&self) -> Result<(), FlushError> {
        let stored = self.flush(true).map(|_| ());
        let mut writer = lock(&self.writer);
        writer.closed = true;
        self.let_go(&mut writer);
        stored
    }

    /// Lets go of the file and of all that waits; what is asked is answered from nothing.
    pub fn stop(&self) {
        let mut writer = lock(&self.writer);
        self.let_go(&mut writer);
        *lock(&self.folder) = Folder::default();
    }

    /// What was, and is now on the node as it looks. Events are not in it: they are the audit trail's.
    pub fn answer(&self, query: &Query, now: &Node) -> Result<Answer, SourceError> {
        let db = lock(&self.db).clone();
        let mut remarks = Vec::new();
        let reader = match db.as_deref().map(store::read) {
            Some(Ok(reader)) => Some(reader),
            Some(Err(error)) => {
                remarks.push(format!("the history cannot be read: {error}"));
                None
            }
            None => {
                remarks.push(
                    "the history's file is not open: only what waits to be stored is shown"
                        .to_owned(),
                );
                None
            }
        };
        let folder = lock(&self.folder);
        let known = Known { reader: reader.as_ref(), folder: &folder };
        query::answer(query, now, &known, remarks)
    }
}

fn buckets(folder: &Folder, pending: &Pending) -> BTreeMap<u32, Bucket> {
    let bucket = |cells: &BTreeMap<Arc<Key>, Cell>| -> Bucket {
        let of = |key: &Key| folder.series().get(key).cloned();
        cells.iter().filter_map(|(key, cell)| Some((of(key)?, *cell))).collect()
    };
    pending.iter().map(|(second, cells)| (*second, bucket(cells))).collect()
}
