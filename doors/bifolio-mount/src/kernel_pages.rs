//! The pages of files in the kernel's page cache: a bounded number of bytes.
//!
//! By default every handle of a file goes through the kernel's page cache. A handle past it
//! (`FOPEN_DIRECT_IO`) would lose bytes of others: when a program maps such a handle, the kernel
//! drops the pages of the file, also a page whose bytes are in a write on its way here. A store to
//! another map then reads the page again without these bytes, and writes all of it back later.
//!
//! So the kernel is told to drop pages of files that no program has open for writing, when it may
//! have more than [`KernelPages::max`] bytes of them: those of the file with the most first. A
//! program that opens one of them for writing waits meanwhile
//! ([`hold_unwritten`](crate::inode::Inode::hold_unwritten)). Pages of files that are open for
//! writing stay, as many as the kernel has memory for; they count after the last such handle is
//! closed.
//!
//! What is counted is an upper bound: the kernel also drops pages when it needs the memory, and a
//! page that it reads again counts twice. One job for each device drops pages, because the kernel
//! waits for reads on their way: a device that hangs holds up only its own.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::inode::Inode;
use crate::volume::Volume;

/// Bytes of a page.
const PAGE_BYTES: u64 = 4096;
/// Time between two rounds.
const PAUSE: Duration = Duration::from_millis(5);

/// The bound on pages.
pub struct KernelPages {
    /// `u64::MAX` if there is none.
    max: u64,
    /// Bytes of files that no program has open for writing. Never less than the sum of their
    /// [`Inode::kernel_bytes`].
    bytes: AtomicU64,
    state: Mutex<State>,
    filled: Condvar,
}

#[derive(Default)]
struct State {
    is_full: bool,
    /// Devices with a job that drops pages.
    busy: HashSet<u64>,
}

impl KernelPages {
    /// Creates a bound of `max` bytes.
    pub fn new(max: u64) -> Self {
        Self { max, bytes: AtomicU64::new(0), state: Mutex::default(), filled: Condvar::new() }
    }

    /// Records that the kernel gets bytes of a file. Never waits for a device.
    pub fn note(&self, inode: &Inode, bytes: u64) {
        // Relaxed, here and below: only counts, and a page more or less does no harm.
        if self.max == u64::MAX || inode.is_written.load(Ordering::Relaxed) {
            return;
        }
        // More than the bound says no more, and sums stay far from their maximum.
        let bytes = bytes.min(self.max + 1).next_multiple_of(PAGE_BYTES);
        let sum = self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        inode.kernel_bytes.fetch_add(bytes, Ordering::Relaxed);
        if sum > self.max && !std::mem::replace(&mut self.state.lock().is_full, true) {
            self.filled.notify_one();
        }
    }

    /// Records that the kernel drops the pages of a file, or that they do not count any more.
    pub fn forget(&self, inode: &Inode) {
        let bytes = inode.kernel_bytes.swap(0, Ordering::Relaxed);
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Records that a program opens the file for writing.
    pub fn begin_writing(&self, inode: &Inode) {
        inode.is_written.store(true, Ordering::Relaxed);
        self.forget(inode);
    }

    /// Records that no program has the file, of so many bytes, open for writing any more.
    pub fn end_writing(&self, inode: &Inode, length: u64) {
        inode.is_written.store(false, Ordering::Relaxed);
        self.note(inode, length);
    }

    fn wait_until_full(&self) {
        let mut state = self.state.lock();
        while !std::mem::take(&mut state.is_full) {
            self.filled.wait(&mut state);
        }
    }

    /// Takes files whose pages are to be dropped, by device, from `inodes`.
    fn take_most(&self, inodes: Vec<Arc<Inode>>) -> HashMap<u64, Vec<Arc<Inode>>> {
        let bytes_of = |inode: &Arc<Inode>| inode.kernel_bytes.load(Ordering::Relaxed);
        let busy = self.state.lock().busy.clone();
        let with_bytes = inodes.into_iter().map(|inode| (bytes_of(&inode), inode));
        let may_be_taken =
            |(bytes, inode): &(u64, Arc<Inode>)| *bytes > 0 && !busy.contains(&inode.key.0);
        let mut files: Vec<_> = with_bytes.filter(may_be_taken).collect();
        files.sort_unstable_by_key(|(bytes, _)| Reverse(*bytes));
        let mut taken = HashMap::<u64, Vec<_>>::new();
        for (_, inode) in files {
            if self.bytes.load(Ordering::Relaxed) <= self.max / 2 {
                break;
            }
            self.forget(&inode);
            taken.entry(inode.key.0).or_default().push(inode);
        }
        taken
    }
}

/// Has the kernel drop pages for as long as the program runs.
pub fn serve(volume: &Arc<Volume>) {
    let pages = &volume.files.kernel_pages;
    loop {
        pages.wait_until_full();
        for (device, inodes) in pages.take_most(volume.table.all()) {
            pages.state.lock().busy.insert(device);
            let of_job = Arc::clone(volume);
            volume.workers.spawn(move || of_job.drop_pages(device, &inodes));
        }
        thread::sleep(PAUSE);
    }
}

impl Volume {
    /// Has the kernel drop the pages of files of a device that no program has open for writing.
    fn drop_pages(&self, device: u64, inodes: &[Arc<Inode>]) {
        scopeguard::defer! {
            self.files.kernel_pages.state.lock().busy.remove(&device);
        }
        for inode in inodes {
            if let Some(_unwritten) = inode.hold_unwritten() {
                self.forget_pages(inode.number);
            }
        }
    }
}
