//! What was, of a plugin that does not answer.

use tessera_config::Config;
use tessera_history::{Context, QueryError, beside};
use tessera_model::clock::unix_ms;
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
    let context = Context { node: "", now_unix_ms: unix_ms(), gpus: &[] };
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
    match books(&config.paths.ledger) {
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
