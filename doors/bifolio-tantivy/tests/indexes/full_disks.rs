//! Disks that are full: a commit fails with the reason, and nothing acknowledged is lost.

use std::fs;
use std::path::Path;

use bifolio_testing::skip;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use tantivy::merge_policy::NoMergePolicy;

use super::model::{assert_holds, cache, commit, last_commit, open, searcher, writer};

/// A file system of this size, gone with this value.
struct SmallDisk<'a>(&'a Path);

impl<'a> SmallDisk<'a> {
    fn mount(path: &'a Path, bytes: u64) -> std::io::Result<Self> {
        let size = std::ffi::CString::new(format!("size={bytes}")).unwrap();
        mount("tmpfs", path, "tmpfs", MountFlags::empty(), Some(size.as_c_str()))?;
        Ok(Self(path))
    }
}

impl Drop for SmallDisk<'_> {
    fn drop(&mut self) {
        let _ = unmount(self.0, UnmountFlags::DETACH);
    }
}

#[test]
fn an_index_on_a_full_disk_goes_on_when_there_is_room() {
    let directory = tempfile::tempdir().unwrap();
    let disk = match SmallDisk::mount(directory.path(), 8 << 20) {
        Ok(disk) => disk,
        Err(error) => return skip("root", format!("cannot mount a small disk: {error}")),
    };
    let (path, ballast) = (disk.0.join("index"), disk.0.join("ballast"));
    fs::create_dir(&path).unwrap();
    // Leaves less room than the index needs.
    fs::write(&ballast, vec![1; 15 << 19]).unwrap();
    let cache = cache(4 << 20);
    let index = open(&path, &cache);
    let mut failing = writer(&index);
    // No merge is under way when the writer is dropped.
    failing.set_merge_policy(Box::new(NoMergePolicy));
    let refused = (1..1000).find_map(|number| Some((number, commit(&mut failing, number).err()?)));
    let (number, error) = refused.expect("the disk is never full");
    // tantivy wraps some errors in text.
    let text = format!("{error:?}");
    assert!(text.contains("No space left") || text.contains("StorageFull"), "{text}");
    drop(failing);
    assert_eq!(last_commit(&index), number - 1);
    assert_holds(&searcher(&index), number - 1);
    assert_eq!(cache.stats().dirty_bytes, 0, "files that no commit has are discarded");

    fs::remove_file(&ballast).unwrap();
    let mut writer = writer(&index);
    (number..number + 5).for_each(|number| commit(&mut writer, number).unwrap());
    writer.wait_merging_threads().unwrap();
    assert_holds(&searcher(&index), number + 4);
    drop(index);
    cache.close().unwrap();
    assert_holds(&searcher(&open(&path, &self::cache(4 << 20))), number + 4);
}
