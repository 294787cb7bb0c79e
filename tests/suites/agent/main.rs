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
    mod contexts;
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

/// What [`tessera_harness::plugin::Tenant`] starts.
#[test]
fn tenant_process() {
    tessera_harness::plugin::tenant_process();
}
