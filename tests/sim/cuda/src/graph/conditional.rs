//! Conditional nodes: CUDA Programming Guide, "Conditional Graph Nodes".
//!
//! Kernels compute nothing, so the condition is the handle's default value, 0 without one; a
//! `while` whose condition is not zero runs its body once.

use super::{CUgraph, Graph};
use crate::abi::{exports, put};
use crate::driver::{driver, lock};
use crate::errors::Result;
use crate::handle::{handle, resolve};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use tessera_cuda::types::{CUDA_ERROR_INVALID_VALUE, CUcontext};

const IF: c_int = 0;
const WHILE: c_int = 1;
const SWITCH: c_int = 2;
const CU_GRAPH_COND_ASSIGN_DEFAULT: c_uint = 1;

pub(crate) struct Conditional {
    pub bodies: Vec<&'static Graph>,
    /// The same as handles: "CUDA-owned array … valid for the lifetime of the conditional node".
    list: Box<[usize]>,
    /// `CU_GRAPH_COND_TYPE_*`.
    pub kind: c_int,
    value: c_uint,
}

/// Conditions' default values, by handle.
static HANDLES: Mutex<BTreeMap<u64, c_uint>> = Mutex::new(BTreeMap::new());

impl Conditional {
    pub(crate) fn create(condition: u64, kind: c_int, size: c_uint) -> Result<Arc<Conditional>> {
        let fits = match kind {
            IF => matches!(size, 1 | 2),
            WHILE => size == 1,
            SWITCH => (1..=1 << 16).contains(&size),
            _ => false,
        };
        let value = lock(&HANDLES).get(&condition).copied();
        let value = value.filter(|_| fits).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let bodies: Vec<_> = (0..size).map(|_| Graph::create_owned()).collect();
        let list = bodies.iter().map(|body| handle(*body) as usize).collect();
        Ok(Arc::new(Conditional { bodies, list, kind, value }))
    }

    /// Its bodies, as an array of handles.
    pub(crate) fn handles(&self) -> *mut CUgraph {
        self.list.as_ptr().cast_mut().cast()
    }

    pub(crate) fn chosen(&self) -> Option<&'static Graph> {
        let index = match (self.kind, self.value) {
            (IF, 0) => 1,
            (WHILE, 0) => return None,
            (IF | WHILE, _) => 0,
            (_, value) => value as usize,
        };
        self.bodies.get(index).copied()
    }
}

exports! {
    fn cuGraphConditionalHandleCreate(out: *mut u64, graph: CUgraph, _ctx: CUcontext, value: c_uint, flags: c_uint) {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        driver()?;
        resolve::<Graph>(graph)?;
        if flags & !CU_GRAPH_COND_ASSIGN_DEFAULT != 0 || out.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let condition = NEXT.fetch_add(1, Ordering::Relaxed);
        lock(&HANDLES).insert(condition, if flags == 0 { 0 } else { value });
        put(out, condition)
    }
}
