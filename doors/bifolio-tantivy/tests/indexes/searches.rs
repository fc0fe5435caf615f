//! Searches over the cache: the same answers as in memory, also while segments are merged.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use bifolio::Cache;
use tantivy::collector::TopDocs;
use tantivy::directory::RamDirectory;
use tantivy::query::QueryParser;
use tantivy::{Index, ReloadPolicy};

use super::model::{
    assert_holds, cache, commit, documents, last_commit, open, open_in, schema, searcher, writer,
};

#[test]
fn answers_are_those_of_an_index_in_memory() {
    let folder = tempfile::tempdir().unwrap();
    let cache = cache(8 << 20);
    let indexes: [Index; 2] = [open(folder.path(), &cache), open_in(RamDirectory::create())];
    for index in &indexes {
        let mut writer = writer(index);
        (1..=10).for_each(|number| commit(&mut writer, number).unwrap());
        writer.wait_merging_threads().unwrap();
    }
    let questions = ["word1", "word1 word2", "+word3 +word4", "\"word5 word6\"", "only100 word7"];
    let [ours, in_memory] = indexes.map(|index| {
        let parser = QueryParser::for_index(&index, vec![schema().1.text]);
        let searcher = searcher(&index);
        assert_holds(&searcher, 10);
        questions.map(|question| {
            let query = parser.parse_query(question).unwrap();
            let found = searcher.search(&query, &TopDocs::with_limit(1000).order_by_score());
            let scores: Vec<f32> = found.unwrap().into_iter().map(|(score, _)| score).collect();
            scores
        })
    });
    assert_eq!(ours, in_memory);
    assert!(ours.iter().any(|scores| !scores.is_empty()));
}

#[test]
fn an_index_is_found_by_another_cache_and_two_share_one() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let shared = cache(8 << 20);
    for (folder, commits) in folders.iter().zip([3, 5]) {
        let index = open(folder.path(), &shared);
        let mut writer = writer(&index);
        (1..=commits).for_each(|number| commit(&mut writer, number).unwrap());
        assert_holds(&searcher(&index), commits);
    }
    for (folder, commits) in folders.iter().zip([3, 5]) {
        let index = open(folder.path(), &cache(8 << 20));
        assert_eq!(last_commit(&index), commits);
        assert_holds(&searcher(&index), commits);
    }
}

/// Searches all the time while commits are made and segments are merged and deleted.
#[test]
fn merges_and_deletions_do_not_disturb_searches() {
    const COMMITS: u64 = 24;
    let folder = tempfile::tempdir().unwrap();
    // The least that this takes, so that pages are evicted.
    let cache = Cache::builder().memory(4 << 20).build().unwrap();
    let index = open(folder.path(), &cache);
    let committed = Arc::new(AtomicU64::new(0));
    let searches = || {
        let (index, committed) = (index.clone(), Arc::clone(&committed));
        thread::spawn(move || {
            let reader = index.reader_builder().reload_policy(ReloadPolicy::Manual);
            let reader: tantivy::IndexReader = reader.try_into().unwrap();
            loop {
                let last = committed.load(Ordering::Acquire);
                reader.reload().unwrap();
                let searcher = reader.searcher();
                let found = searcher.num_docs();
                // A commit after `last` may be in it.
                let number = (last..=COMMITS).find(|number| documents(*number) == found);
                assert_holds(&searcher, number.expect("the documents of some commit"));
                if last == COMMITS {
                    return;
                }
            }
        })
    };
    let threads = [searches(), searches()];
    let mut writer = writer(&index);
    for number in 1..=COMMITS {
        commit(&mut writer, number).unwrap();
        // Acquire of the searches: what they load next has this commit.
        committed.store(number, Ordering::Release);
        if number % 4 == 0 {
            let segments = index.searchable_segment_ids().unwrap();
            writer.merge(&segments).wait().unwrap();
            writer.garbage_collect_files().wait().unwrap();
        }
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    writer.wait_merging_threads().unwrap();
    assert_holds(&searcher(&index), COMMITS);
}
