//! Storage with a bound: the file never grows beyond it.

use std::io;
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use redb::{BackendError, StorageBackend};

/// What a [`Bounded`] file's owner reads and sets while redb has it.
#[derive(Debug, Default)]
pub(crate) struct Extent {
    /// Most bytes that the file may have.
    bound: AtomicU64,
    /// Bytes that it has.
    len: AtomicU64,
}

impl Extent {
    pub(crate) fn new(bound: u64) -> Arc<Self> {
        Arc::new(Extent { bound: AtomicU64::new(bound), len: AtomicU64::new(0) })
    }

    pub(crate) fn bound(&self) -> u64 {
        self.bound.load(Ordering::Relaxed)
    }

    pub(crate) fn len(&self) -> u64 {
        self.len.load(Ordering::Relaxed)
    }
}

/// Storage that refuses to be longer than its bound.
#[derive(Debug)]
pub(crate) struct Bounded<B> {
    inner: B,
    extent: Arc<Extent>,
    /// Waits for the disk where redb asks for it. Without, the kernel has what was written whatever becomes of the
    /// process, and a power cut may damage the file.
    sync: bool,
}

impl<B: StorageBackend> Bounded<B> {
    pub(crate) fn new(inner: B, extent: Arc<Extent>, sync: bool) -> io::Result<Self> {
        extent.len.store(inner.len()?, Ordering::Relaxed);
        Ok(Bounded { inner, extent, sync })
    }
}

impl<B: StorageBackend> StorageBackend for Bounded<B> {
    fn len(&self) -> io::Result<u64> {
        self.inner.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.inner.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        if len > self.extent.bound() && len > self.extent.len() {
            return Err(io::Error::new(
                io::ErrorKind::QuotaExceeded,
                format!("{len} bytes are more than history.size"),
            ));
        }
        self.inner.set_len(len)?;
        self.extent.len.store(len, Ordering::Relaxed);
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        if self.sync { self.inner.sync_data() } else { Ok(()) }
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        // A write behind the end would lengthen a file, too.
        let end = offset.saturating_add(data.len() as u64);
        if end > self.extent.len() {
            return Err(io::Error::new(io::ErrorKind::QuotaExceeded, "a write beyond the end"));
        }
        self.inner.write(offset, data)
    }

    fn close(&self) -> io::Result<()> {
        self.inner.close()
    }

    fn try_lock_range(&self, from: Bound<u64>, to: Bound<u64>) -> Result<bool, BackendError> {
        self.inner.try_lock_range(from, to)
    }

    fn try_lock_shared_range(
        &self,
        from: Bound<u64>,
        to: Bound<u64>,
    ) -> Result<bool, BackendError> {
        self.inner.try_lock_shared_range(from, to)
    }

    fn lock_range(&self, from: Bound<u64>, to: Bound<u64>) -> Result<(), BackendError> {
        self.inner.lock_range(from, to)
    }

    fn lock_shared_range(&self, from: Bound<u64>, to: Bound<u64>) -> Result<(), BackendError> {
        self.inner.lock_shared_range(from, to)
    }

    fn unlock_range(&self, from: Bound<u64>, to: Bound<u64>) -> Result<(), BackendError> {
        self.inner.unlock_range(from, to)
    }

    fn query_lock_range(&self, from: Bound<u64>, to: Bound<u64>) -> Result<bool, BackendError> {
        self.inner.query_lock_range(from, to)
    }
}
