//! Streams and captures: hooks through which the gate learns what becomes of the streams that it has
//! to drain.
#![allow(non_snake_case, reason = "hooks carry the driver's own names")]

use crate::gate::{Stream, capture, elsewhere, streams};
use crate::pools::ask::is_capturing;
use crate::thread::{Answer, Call};

pub use destroying as cuStreamDestroy;
pub use joining as cuStreamWaitEvent;

pub use at_host as cuLaunchHostFunc;
pub use at_host as cuLaunchHostFunc_v2;
pub use at_host as cuStreamAddCallback;
pub use at_host as cuStreamBatchMemOp;
pub use at_host as cuStreamWaitValue32;
pub use at_host as cuStreamWaitValue64;
pub use at_host as cuWaitExternalSemaphoresAsync;

pub use beginning as cuStreamBeginCapture;
pub use beginning as cuStreamBeginCaptureToCig;
pub use beginning as cuStreamBeginCaptureToGraph;
pub use beginning as cuStreamBeginCapture_v2;
pub use beginning as cuStreamBeginRecaptureToGraph;

pub use ending as cuStreamEndCapture;
pub use ending as cuStreamEndCaptureToCig;

/// A stream that ends is marked before, so that what is in flight in it is still awaited.
pub fn destroying(call: Call<'_>, stream: Stream) -> Answer {
    let order = streams::destroying(stream);
    call()?;
    capture::destroyed(order, stream);
    Ok(())
}

/// A wait for a captured event puts the stream into the capture.
pub fn joining(call: Call<'_>, stream: Stream) -> Answer {
    let _order = capture::joining(stream);
    call()
}

/// What the GPU has no part in: a host function, a wait for a word, or for what others signal, the host or another
/// process say.
pub fn at_host(call: Call<'_>, stream: Stream) -> Answer {
    let begun = elsewhere::begin(stream);
    let answer = call();
    if let Some(begun) = begun {
        begun.end();
    }
    answer
}

pub fn beginning(call: Call<'_>, stream: Stream) -> Answer {
    let order = capture::beginning(stream);
    call()?;
    capture::began(order, stream);
    Ok(())
}

/// Whether it ended is the driver's to say: an error may mean that it goes on (another thread asked,
/// or another stream of it), or that it came to nothing.
pub fn ending(call: Call<'_>, stream: Stream) -> Answer {
    let order = capture::ending();
    let before = capture::any() && is_capturing(stream);
    let answer = call();
    if before && !is_capturing(stream) {
        capture::ended(order, stream);
    }
    answer
}
