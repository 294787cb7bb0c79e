//! Objects that go with a value of the program.

use anyhow::Result;
use serde_json::Value;

use crate::kubectl::Kubectl;

/// An object on the cluster, deleted when this goes.
#[derive(Debug)]
pub struct Applied<'a> {
    kubectl: &'a Kubectl,
    object: Value,
}

impl<'a> Applied<'a> {
    /// Creates or changes it.
    ///
    /// # Errors
    /// The API server's refusal.
    pub fn new(kubectl: &'a Kubectl, object: Value) -> Result<Self> {
        kubectl.apply(&object)?;
        Ok(Self { kubectl, object })
    }
}

impl Drop for Applied<'_> {
    fn drop(&mut self) {
        let text = self.object.to_string();
        let delete = ["delete", "-f", "-", "--ignore-not-found", "--timeout=50s"];
        if let Err(error) = self.kubectl.try_run(&delete, Some(&text)) {
            println!("     {} stays: {error:#}", self.object["metadata"]["name"]);
        }
    }
}
