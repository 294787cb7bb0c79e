//! What was, of a plugin that does not answer.

use tessera_config::Config;
use tessera_history::{Context, Key, QueryError, Series, beside};
use tessera_model::clock::unix_ms;
use tessera_model::record::{Holder, Record};
use tessera_view::history::{Answer, Query};

use super::events;
use crate::offline::books;

/// From a copy of the history's file, and the ledger. `silence`: why the plugin does not answer, a
/// sentence.
///
/// # Errors
/// The file cannot be read, or the query names nothing in it.
pub fn offline(config: &Config, query: &Query, silence: &str) -> Result<Answer, QueryError> {
    let path = beside(&config.paths.ledger);
    // Indexes are the plugin's to know.
    let books = books(&config.paths.ledger);
    let tenants: Vec<Series> =
        books.iter().flat_map(|books| &books.records).flat_map(series).collect();
    let context = Context { now_unix_ms: unix_ms(), tenants: &tenants, ..Context::default() };
    if matches!(path.try_exists(), Ok(false)) {
        return Err(QueryError::Unavailable(silence.to_owned()));
    }
    let remark = format!(
        "{silence}. This is read from {}, whose last minute may be missing",
        path.display()
    );
    let read_copy = tessera_history::offline(&path, query, &context);
    let mut answer =
        read_copy.map_err(|error| QueryError::Unavailable(format!("{silence}; {error}")))??;
    answer.remarks.insert(0, remark);
    match books {
        Ok(books) => {
            events::add(&mut answer, query, &books.trail);
            for one in &mut answer.tenants {
                one.live = books.records.iter().any(|record| {
                    record.id.as_str() == one.id && record.generation == one.generation
                });
            }
        }
        Err(error) => answer.remarks.push(error),
    }
    Ok(answer)
}

/// A record's series, on each of its GPUs.
fn series(record: &Record) -> impl Iterator<Item = Series> {
    let holder = record.holder.as_ref();
    let of = |name: fn(&Holder) -> &String| holder.map(name).cloned().unwrap_or_default();
    let (namespace, pod) = (of(|holder| &holder.namespace), of(|holder| &holder.pod));
    let container = of(|holder| &holder.container);
    record.grants.iter().map(move |grant| Series {
        key: Key {
            id: record.id.to_string(),
            generation: record.generation,
            gpu_uuid: grant.uuid.clone(),
        },
        namespace: namespace.clone(),
        pod: pod.clone(),
        container: container.clone(),
    })
}
