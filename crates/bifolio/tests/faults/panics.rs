//! A user's backing that panics: its calls fail, and nothing else.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::{PAGE, read, read_all, wait_until, writable};
use bifolio::Cache;
use bifolio::backing::{
    Backing, DirectBacking, DirectStatus, IoBuf, IoBufMut, IoRequest, Submission,
};
use bifolio_testing::MemoryBacking;

/// A backing one of whose calls panics while a flag is set.
#[derive(Debug)]
struct Panicking {
    inner: MemoryBacking,
    call: Mutex<&'static str>,
}

impl Panicking {
    fn may(&self, call: &str) {
        let panics = *self.call.lock().unwrap() == call;
        assert!(!panics, "a backing of the test panics in {call}");
    }
}

impl Backing for Panicking {
    fn read_at(&self, target: &mut IoBufMut<'_>, position: u64) -> io::Result<usize> {
        self.may("read_at");
        self.inner.read_at(target, position)
    }

    fn write_at(&self, source: &IoBuf<'_>, position: u64) -> io::Result<usize> {
        self.may("write_at");
        self.inner.write_at(source, position)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.may("sync_data");
        self.inner.sync_data()
    }

    fn len_bytes(&self) -> io::Result<u64> {
        self.may("len_bytes");
        self.inner.len_bytes()
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        self.may("set_len");
        self.inner.set_len(length)
    }

    fn describe(&self) -> String {
        self.may("describe");
        "panicking".to_owned()
    }

    fn as_direct(&self) -> Option<&dyn DirectBacking> {
        Some(self)
    }
}

impl DirectBacking for Panicking {
    fn submission(&self, _: &IoRequest) -> Option<Submission<'_>> {
        self.may("submission");
        None
    }

    fn sync_all(&self) -> io::Result<()> {
        self.may("sync_all");
        self.inner.sync_all()
    }

    fn direct(&self) -> DirectStatus {
        self.may("direct");
        DirectStatus::Custom
    }
}

#[test]
fn a_backing_that_panics_takes_nothing_down_with_it() {
    let calls = [
        "read_at",
        "write_at",
        "submission",
        "sync_data",
        "sync_all",
        "len_bytes",
        "set_len",
        "describe",
        "direct",
    ];
    for call in calls {
        let inner = MemoryBacking::new(vec![1; 64 * PAGE as usize]);
        let backing = Arc::new(Panicking { inner, call: Mutex::new("") });
        let builder = Cache::builder().memory(256 << 10).dirty_age_max(Duration::from_millis(1));
        let cache = builder.reclaim_wait_max(Duration::from_millis(100)).build().unwrap();
        let file = cache.open_backing(backing.clone(), &writable()).unwrap();
        let other = cache.open_backing(Arc::new(MemoryBacking::new(vec![2; 100])), &writable());
        let other = other.unwrap();
        *backing.call.lock().unwrap() = call;
        // Each of these works or fails; the flusher and readahead are at work, too.
        let mut bytes = [0; 3 * PAGE as usize];
        let _ = file.read_at(&mut bytes, 5 * PAGE);
        let _ = file.write_at(&[3; 2 * PAGE as usize], 20 * PAGE);
        let _ = file.write_at(&[3; 10], 63 * PAGE + 4090);
        let _ = file.sync_data();
        let _ = file.sync_all();
        let _ = file.set_len(62 * PAGE);
        let _ = file.set_len(70 * PAGE);
        let _ = cache.stats();
        let opened = cache.open_backing(backing.clone(), &writable());
        assert_eq!(opened.is_err(), call == "len_bytes");
        drop(opened);
        assert_eq!(read_all(&other), [2; 100], "{call}");
        *backing.call.lock().unwrap() = "";
        file.set_len(60 * PAGE).unwrap();
        file.write_all_at(&[4; 3 * PAGE as usize], 10 * PAGE).unwrap();
        // The first ones may tell of what has failed.
        wait_until("syncs work again", || file.sync_data().is_ok());
        assert_eq!(read(&file, 10 * PAGE, 3 * PAGE as usize), [4; 3 * PAGE as usize], "{call}");
        assert_eq!(&backing.inner.bytes()[10 * PAGE as usize..][..10], [4; 10], "{call}");
        drop(file);
        cache.close().unwrap();
    }
}
