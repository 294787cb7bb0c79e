//! The plugin on a node with a fake kubelet and GPUs that a test can break, in the test's process or in its own.

mod adversity {
    //! What fails, is in the way, or means harm.

    mod corpus;
    mod failures;
    mod hostile;
    mod other_plugins;
    mod restarts;
    mod rights;
    mod wedged;
}

mod allocate {
    //! What a container gets: which GPU, how much of it, and how it is delivered.

    mod allocation;
    mod delivery;
    mod machines;
    mod shares;
}

mod kubelet {
    //! The gRPC calls between the plugin and kubelet, with a plugin that the test scripts.

    mod authority;
    mod calls;
}

mod observe {
    //! What the plugin sees of GPUs and tenants, and what it says about them.

    mod api;
    mod health;
    mod history;
    mod metrics {
        //! Metrics and probes of a running plugin, over HTTP as Prometheus and kubelet ask: what is served, what is
        //! said, what it costs, and that everything that is written about it names what there is.

        mod autoscale;
        mod series;
    }
    mod others;
    mod overhead;
    mod trust;
}

mod operate {
    //! What an administrator changes, and the commands for it.

    mod command_line;
    mod reload;
    mod steer;
    mod top;
}

/// All lines of the audit trail of a ledger that no plugin has open.
fn trail(ledger: &std::path::Path) -> Vec<tessera_model::audit::Event> {
    let (mut ledger, _) = tessera_store::Ledger::open(ledger, false).unwrap();
    ledger.lines().unwrap().events
}

/// Says that a request over the quota was refused, as the shim does.
fn refused(session: &impl std::os::fd::AsRawFd, bytes: u64) {
    use tessera_region::session::{EVENT_UUID_LEN, Event, EventKind, Message};
    let kind = EventKind::OverQuota;
    let event = Event { kind, gpu: Some(0), bytes, uuid: [0; EVENT_UUID_LEN] };
    let (message, none) = (Message::Event(event).encode(), nix::sys::socket::MsgFlags::empty());
    nix::sys::socket::send(session.as_raw_fd(), &message, none).unwrap();
}

/// What [`tessera_harness::plugin::Tenant`] starts.
#[test]
fn tenant_process() {
    tessera_harness::plugin::tenant_process();
}
