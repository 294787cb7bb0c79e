//! User objects: CUDA Programming Guide, "CUDA User Objects": a count, and what to call at its end.

use super::{CUgraph, Graph};
use crate::abi::{exports, put};
use crate::driver::driver;
use crate::errors::Result;
use crate::handle::{Header, enliven, handle, kill, object, resolve};
use crate::host_function::HostFn;
use std::ffi::{c_uint, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use tessera_cuda::types::CUDA_ERROR_INVALID_VALUE;

#[repr(C)]
pub(crate) struct UserObject {
    header: Header,
    count: AtomicU32,
    destroy: HostFn,
    data: usize,
}

object!(UserObject, 0x554f_424a);

type CUuserObject = *mut c_void;

impl UserObject {
    fn retain(&self, count: u32) -> Result<()> {
        if count == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        self.count.fetch_add(count, Ordering::AcqRel);
        Ok(())
    }

    /// Gives references back; the last one ends the object.
    pub(crate) fn release(&'static self, count: u32) -> Result<()> {
        let less = |now: u32| if count == 0 { None } else { now.checked_sub(count) };
        let before = self.count.fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
        if before.map_err(|_| CUDA_ERROR_INVALID_VALUE)? == count && kill(self) {
            // SAFETY: the creator promised a function that may be called once with this argument.
            unsafe { (self.destroy)(self.data as *mut c_void) };
        }
        Ok(())
    }
}

exports! {
    fn cuUserObjectCreate(out: *mut CUuserObject, data: *mut c_void, destroy: Option<HostFn>, count: c_uint, flags: c_uint) {
        driver()?;
        // CU_USER_OBJECT_NO_DESTRUCTOR_SYNC is required.
        let destroy = destroy.filter(|_| flags == 1 && count > 0).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let object = UserObject {
            header: Header::new(),
            count: AtomicU32::new(count),
            destroy,
            data: data as usize,
        };
        put(out, handle(enliven(Box::leak(Box::new(object)))))
    }
    fn cuGraphRetainUserObject(graph: CUgraph, object: CUuserObject, count: c_uint, flags: c_uint) {
        driver()?;
        let graph: &Graph = resolve(graph)?;
        let object: &'static UserObject = resolve(object)?;
        // CU_GRAPH_USER_OBJECT_MOVE: the caller's references become the graph's.
        match flags {
            0 => object.retain(count)?,
            1 if count > 0 => {}
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        }
        graph.lock().objects.push((object, count));
        Ok(())
    }
    fn cuGraphReleaseUserObject(graph: CUgraph, object: CUuserObject, count: c_uint) {
        driver()?;
        let graph: &Graph = resolve(graph)?;
        let object: &'static UserObject = resolve(object)?;
        let mut state = graph.lock();
        let held: u32 = state.objects.iter().filter(|(o, _)| std::ptr::eq(*o, object)).map(|o| o.1).sum();
        let left = held.checked_sub(count).filter(|_| count > 0).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        state.objects.retain(|(o, _)| !std::ptr::eq(*o, object));
        if left > 0 {
            state.objects.push((object, left));
        }
        drop(state);
        object.release(count)
    }
}
