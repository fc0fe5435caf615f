//! Disks that are full: a commit fails with the reason, and nothing acknowledged is lost.

use std::fs;
use std::sync::Arc;

use bifolio::Cache;
use bifolio::backing::FileIdentity;
use bifolio_testing::{Call, Fault, FaultyBacking, MemoryBacking, SmallDisk};
use redb::Database;

use super::model::{assert_recovered, cache, commit, last_commit, open, open_file, writable};

/// Commits until one fails, and returns that and the number of the last that did not.
fn commit_until_full(database: &Database, first: u64) -> (redb::Error, u64) {
    for number in first..first + 10_000 {
        if let Err(error) = commit(database, number) {
            return (error, number - 1);
        }
    }
    panic!("the disk is never full");
}

fn assert_says_full(error: &redb::Error) {
    let redb::Error::Io(cause) = error else { panic!("another kind of error: {error:?}") };
    assert_eq!(cause.kind(), std::io::ErrorKind::StorageFull, "{cause}");
    assert!(cause.to_string().contains("write"), "{cause}");
}

fn open_over(backing: &Arc<FaultyBacking>, cache: &Cache) -> Database {
    open_file(cache.open_backing(backing.clone(), &writable()).unwrap())
}

#[test]
fn a_commit_on_a_full_disk_fails_and_can_be_repeated() {
    let memory = MemoryBacking::new(Vec::new()).identified(FileIdentity::custom(1, 1));
    let backing = Arc::new(FaultyBacking::new(memory));
    let cache = cache(1 << 20);
    let database = open_over(&backing, &cache);
    (1..=30).for_each(|number| commit(&database, number).unwrap());
    backing.inject(Fault::on(Call::Write).forever().fails(libc::ENOSPC));
    let error = commit(&database, 31).unwrap_err();
    assert_says_full(&error);
    assert!(matches!(commit(&database, 32), Err(redb::Error::PreviousIo)));
    // redb goes on only after a new open, and the disk may still be full then.
    drop(database);
    backing.heal();
    let mut database = open_over(&backing, &cache);
    let last = assert_recovered(&mut database, 30);
    commit(&database, last + 1).unwrap();
    drop(database);
    cache.close().unwrap();
    assert_recovered(&mut open_over(&backing, &self::cache(1 << 20)), last + 1);
}

#[test]
fn nothing_acknowledged_is_lost_if_the_process_ends_with_a_full_disk() {
    let backing = Arc::new(FaultyBacking::new(MemoryBacking::new(Vec::new())));
    let cache = cache(1 << 20);
    let database = open_over(&backing, &cache);
    (1..=30).for_each(|number| commit(&database, number).unwrap());
    // One write in four is refused, so that a commit is on the disk in part.
    for nth in 0..8 {
        backing.inject(Fault::on(Call::Write).nth(1 + 4 * nth).fails(libc::ENOSPC));
    }
    backing.inject(Fault::on(Call::Write).nth(32).forever().fails(libc::ENOSPC));
    let (_, acknowledged) = commit_until_full(&database, 31);
    // What the cache still has of this file is not seen by another one.
    let bytes = Arc::clone(&backing);
    backing.heal();
    let found = self::cache(1 << 20).open_backing(bytes, &writable()).unwrap();
    let mut copy = vec![0; found.len() as usize];
    found.read_exact_at(&mut copy, 0).unwrap();
    let copy = Arc::new(FaultyBacking::new(MemoryBacking::new(copy)));
    assert_recovered(&mut open_over(&copy, &self::cache(1 << 20)), acknowledged);
}

#[test]
fn a_database_on_a_real_full_disk_goes_on_when_there_is_room() {
    let Some(disk) = SmallDisk::mount(8 << 20) else { return };
    let (path, ballast) = (disk.path().join("full.redb"), disk.path().join("ballast"));
    // Leaves less room than the database needs.
    fs::write(&ballast, vec![1; 13 << 19]).unwrap();
    let cache = cache(1 << 20);
    let database = open(&path, &cache);
    let (error, acknowledged) = commit_until_full(&database, 1);
    assert_says_full(&error);
    drop(database);
    fs::remove_file(&ballast).unwrap();
    let mut database = open(&path, &cache);
    let last = assert_recovered(&mut database, acknowledged);
    (last + 1..=last + 20).for_each(|number| commit(&database, number).unwrap());
    assert_eq!(last_commit(&database), last + 20);
    drop(database);
    cache.close().unwrap();
    assert_recovered(&mut open(&path, &self::cache(1 << 20)), last + 20);
}
