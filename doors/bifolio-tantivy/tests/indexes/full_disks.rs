//! Disks that are full: a commit fails with the reason, and nothing acknowledged is lost.

use std::fs;

use bifolio_testing::SmallDisk;
use tantivy::merge_policy::NoMergePolicy;

use super::model::{assert_holds, cache, commit, last_commit, open, searcher, writer};

#[test]
fn an_index_on_a_full_disk_goes_on_when_there_is_room() {
    let Some(disk) = SmallDisk::mount(8 << 20) else { return };
    let (path, ballast) = (disk.path().join("index"), disk.path().join("ballast"));
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
    assert_eq!(cache.stats().memory.dirty_bytes, 0, "files that no commit has are discarded");

    fs::remove_file(&ballast).unwrap();
    let mut writer = writer(&index);
    (number..number + 5).for_each(|number| commit(&mut writer, number).unwrap());
    writer.wait_merging_threads().unwrap();
    assert_holds(&searcher(&index), number + 4);
    drop(index);
    cache.close().unwrap();
    assert_holds(&searcher(&open(&path, &self::cache(4 << 20))), number + 4);
}
