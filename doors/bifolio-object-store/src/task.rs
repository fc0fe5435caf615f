//! Work in a task of its own, which goes on if the caller's future is leaked.
//!
//! A future that is leaked is never polled again and never dropped: a permit that it holds, or that
//! a semaphore hands to it, is lost, and what waits for its result waits for ever. So what holds
//! something that others need runs in a task, which the caller only waits for.

use scopeguard::guard;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

/// Runs `work` in a task, which is aborted when the returned future is dropped. Returns `None` if
/// the runtime shuts down, or `work` panics.
pub(crate) fn in_task<T: Send + 'static>(
    runtime: &Handle,
    work: impl Future<Output = T> + Send + 'static,
) -> impl Future<Output = Option<T>> + Send + 'static {
    let mut task = guard(runtime.spawn(work), |task: JoinHandle<T>| task.abort());
    async move { (&mut *task).await.ok() }
}
