//! What users are given and only the release build has: how the shim is linked, under which C libraries it loads, and
//! that the plugin unwinds. `make shipped` builds it and runs this; `make test` doesn't.

mod ledger;
mod shim;
