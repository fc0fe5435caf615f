//! Buffers for long reads that may wait for a device.
//!
//! A program may have many threads that read at a time, and each read needs its length in memory
//! until it is answered. So a device has a limit of such buffers; further reads wait for one. Reads
//! of other devices do not, so a device that hangs stops only its own.

use std::collections::HashMap;

use parking_lot::{Condvar, Mutex};

/// Maximum number of buffers that the reads of a device use at a time.
const OF_DEVICE_MAX: usize = 8;
/// Maximum number of unused buffers that are kept.
const FREE_MAX: usize = 8;

/// The buffers of a mount.
#[derive(Default)]
pub struct ReadBuffers {
    state: Mutex<State>,
    returned: Condvar,
}

#[derive(Default)]
struct State {
    free: Vec<Vec<u8>>,
    /// Buffers in use, by device.
    used: HashMap<u64, usize>,
}

impl ReadBuffers {
    /// Runs `read` with a buffer of `size` bytes. Waits while other reads of the device use as many
    /// buffers as they may.
    pub fn with<T>(&self, device: u64, size: u32, read: impl FnOnce(&mut [u8]) -> T) -> T {
        let mut state = self.state.lock();
        while *state.used.entry(device).or_default() >= OF_DEVICE_MAX {
            self.returned.wait(&mut state);
        }
        *state.used.entry(device).or_default() += 1;
        let free = state.free.pop();
        drop(state);
        // Given back even if `read` panics.
        let mut buffer = scopeguard::guard(free.unwrap_or_default(), |buffer| {
            let mut state = self.state.lock();
            *state.used.entry(device).or_default() -= 1;
            if state.free.len() < FREE_MAX {
                state.free.push(buffer);
            }
            self.returned.notify_all();
        });
        let length = buffer.len().max(size as usize);
        buffer.resize(length, 0);
        read(&mut buffer[..size as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;
    use std::thread;

    #[test]
    fn reads_of_one_device_wait_for_a_buffer_and_others_do_not() {
        let buffers = Arc::new(ReadBuffers::default());
        let (begun, begins) = mpsc::channel();
        let (release, hang) = mpsc::channel::<()>();
        let hang = Arc::new(Mutex::new(hang));
        let most = Arc::new(AtomicUsize::new(0));
        let readers: Vec<_> = (0..3 * OF_DEVICE_MAX)
            .map(|_| {
                let (buffers, begun) = (Arc::clone(&buffers), begun.clone());
                let (hang, most) = (Arc::clone(&hang), Arc::clone(&most));
                thread::spawn(move || {
                    buffers.with(1, 100, |buffer| {
                        assert_eq!(buffer.len(), 100);
                        most.fetch_add(1, Ordering::Relaxed);
                        begun.send(()).unwrap();
                        assert!(hang.lock().recv().is_err());
                        assert!(most.fetch_sub(1, Ordering::Relaxed) <= OF_DEVICE_MAX);
                    });
                })
            })
            .collect();
        (0..OF_DEVICE_MAX).for_each(|_| begins.recv().unwrap());
        assert_eq!(buffers.with(2, 100, |_| most.load(Ordering::Relaxed)), OF_DEVICE_MAX);
        drop(release);
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        assert!(buffers.state.lock().free.len() <= FREE_MAX);
    }

    #[test]
    fn a_read_that_panics_gives_its_buffer_back() {
        let buffers = ReadBuffers::default();
        let read = || buffers.with(1, 100, |_| resume_unwind(Box::new(())));
        assert!(catch_unwind(AssertUnwindSafe(read)).is_err());
        let state = buffers.state.lock();
        assert_eq!((state.used[&1], state.free.len()), (0, 1));
    }
}
