//! An end that nothing can delay.
//!
//! SIGTERM asks the plugin to drain. A thread of its own hears it, too, and ends the process where that does
//! not come to an end: a worker that waits for a file system or a driver that hangs waits for ever, and
//! kubelet kills only what it has given up.

use std::io;
use std::sync::mpsc::channel;
use std::time::Duration;

use nix::sys::signal::{SigSet, Signal};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tracing::error;

/// How long a plugin may drain: less than the 10 s that its pod has (`terminationGracePeriodSeconds`).
const GRACE: Duration = Duration::from_secs(7);
/// How long the process may take to exit by itself, with its libraries' own last actions.
const LAST: Duration = Duration::from_secs(1);

/// Hears SIGTERM and SIGINT from now on.
pub(super) struct Ending {
    asked: watch::Receiver<bool>,
}

impl Ending {
    /// Begins to listen, in a thread. SIGHUP is heard as well and means nothing yet: one that comes before
    /// somebody wants it does not end the process.
    pub(super) fn listen() -> io::Result<Self> {
        // The kernel hands a signal to one thread, by preference the first, also if that waits in a call that
        // only SIGKILL interrupts. All others than the one made here, and those made later, block these.
        let ours: SigSet = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP].into_iter().collect();
        ours.thread_block()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (ask, asked) = watch::channel(false);
        let (ready, is_ready) = channel::<io::Result<()>>();
        std::thread::Builder::new().name("signals".into()).stack_size(256 << 10).spawn(
            move || {
                runtime.block_on(async {
                    let handlers = || {
                        let hangup = signal(SignalKind::hangup())?;
                        Ok((
                            signal(SignalKind::terminate())?,
                            signal(SignalKind::interrupt())?,
                            hangup,
                        ))
                    };
                    let (mut terminate, mut interrupt, _hangup) = match handlers() {
                        Ok(handlers) => handlers,
                        Err(error) => return drop(ready.send(Err(error))),
                    };
                    if let Err(error) = ours.thread_unblock() {
                        return drop(ready.send(Err(error.into())));
                    }
                    // The starting thread waits for it.
                    let _ = ready.send(Ok(()));
                    tokio::select! {
                        _ = terminate.recv() => {}
                        _ = interrupt.recv() => {}
                    }
                    ask.send_replace(true);
                    tokio::time::sleep(GRACE).await;
                    exit();
                });
            },
        )?;
        is_ready.recv().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))?;
        Ok(Ending { asked })
    }

    /// Done when the process is to end.
    pub(super) async fn asked(&self) {
        let mut asked = self.asked.clone();
        // The thread ends only with the process.
        let _ = asked.wait_for(|asked| *asked).await;
    }
}

/// Ends the process, whatever its log or its libraries' last actions wait for.
fn exit() -> ! {
    let fallback = std::thread::Builder::new().stack_size(64 << 10).spawn(|| {
        std::thread::sleep(LAST);
        std::process::abort();
    });
    if fallback.is_err() {
        std::process::abort();
    }
    error!(
        "something that was begun does not end: stopping without it after {} s; no running pod is \
         concerned",
        GRACE.as_secs()
    );
    std::process::exit(1)
}
