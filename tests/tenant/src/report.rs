//! One JSON object per line on standard output.

use std::io::Write;

use serde_json::{Value, json};

/// Prints `{"event": event, "pid": …, …fields}` and flushes; a closed pipe is no error of ours.
pub fn line(event: &str, fields: Value) {
    let mut object = json!({ "event": event, "pid": std::process::id() });
    if let (Some(object), Value::Object(fields)) = (object.as_object_mut(), fields) {
        object.extend(fields);
    }
    let mut out = std::io::stdout().lock();
    // One write, so that lines of several processes on one pipe stay whole.
    let _ = out.write_all(format!("{object}\n").as_bytes());
    let _ = out.flush();
}
