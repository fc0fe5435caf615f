//! The index that is measured, and the questions that are asked of it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use fastrand::Rng;
use serde::{Deserialize, Serialize};
use tantivy::directory::MmapDirectory;
use tantivy::merge_policy::NoMergePolicy;
use tantivy::schema::{Field, STORED, STRING, Schema, TEXT};
use tantivy::{Index, IndexSettings, IndexWriter, doc};

use super::corpus;

/// Text between two commits. Segments are not merged: each commit makes one per thread.
const COMMIT_BYTES: usize = 256 << 20;
const WRITER_THREADS: usize = 2;
const WRITER_BYTES: usize = 1 << 30;
/// Questions that are kept; every round begins at another one.
const QUESTIONS: usize = 20_000;
const QUESTIONS_FILE: &str = "questions.json";

/// Words of one passage: every question has an answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Question {
    pub(super) words: [String; 3],
    /// Adjacent words.
    pub(super) phrase: [String; 2],
}

/// Fields of a document.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fields {
    pub(super) path: Field,
    pub(super) line: Field,
    pub(super) text: Field,
}

fn schema() -> (Schema, Fields) {
    let mut builder = Schema::builder();
    let path = builder.add_text_field("path", STRING | STORED);
    let line = builder.add_u64_field("line", STORED);
    let text = builder.add_text_field("text", TEXT | STORED);
    (builder.build(), Fields { path, line, text })
}

/// The fields of an index that `build` has made.
pub(super) fn fields() -> Fields {
    schema().1
}

/// Makes an index of at least `size_bytes` in `folder`, and returns its size. Begins anew with the
/// text if there is not enough. Nothing of it stays in the page cache.
pub(super) fn build(folder: &Path, texts: &[PathBuf], size_bytes: u64) -> anyhow::Result<u64> {
    if questions(folder).is_ok() {
        return forget_all(folder);
    }
    fs::create_dir_all(folder)?;
    let files = corpus::files(texts);
    let (schema, fields) = schema();
    let directory = MmapDirectory::open(folder)?;
    let index = Index::create(directory, schema, IndexSettings::default())?;
    let mut writer: IndexWriter = index.writer_with_num_threads(WRITER_THREADS, WRITER_BYTES)?;
    writer.set_merge_policy(Box::new(NoMergePolicy));
    let mut random = Rng::with_seed(1);
    let mut questions = Vec::new();
    let commit_bytes = COMMIT_BYTES.min(size_bytes as usize / 2);
    let (mut pending_bytes, mut passages) = (0, 0_usize);
    let has_enough = |folder: &Path| size_of(folder).map(|size| size >= size_bytes);
    'build: loop {
        let passages_before = passages;
        for path in &files {
            for passage in corpus::passages(path) {
                passages += 1;
                pending_bytes += passage.text.len();
                keep_question(&mut questions, &passage.text, passages, &mut random);
                writer.add_document(doc!(
                    fields.path => passage.path,
                    fields.line => passage.line,
                    fields.text => passage.text,
                ))?;
            }
            if pending_bytes >= commit_bytes {
                writer.commit()?;
                pending_bytes = 0;
                if has_enough(folder)? {
                    break 'build;
                }
            }
        }
        ensure!(passages > passages_before, "there is no text below {texts:?}");
        writer.commit()?;
        pending_bytes = 0;
        if has_enough(folder)? {
            break;
        }
    }
    writer.wait_merging_threads()?;
    ensure!(!questions.is_empty(), "the text below {texts:?} has no words");
    fs::write(folder.join(QUESTIONS_FILE), serde_json::to_vec(&questions)?)?;
    forget_all(folder)
}

/// Drops the index from the page cache, and returns its size.
fn forget_all(folder: &Path) -> anyhow::Result<u64> {
    for entry in fs::read_dir(folder)? {
        forget(&entry?.path())?;
    }
    size_of(folder)
}

/// The questions of an index.
pub(super) fn questions(folder: &Path) -> anyhow::Result<Vec<Question>> {
    let text = fs::read(folder.join(QUESTIONS_FILE)).context("read the questions")?;
    Ok(serde_json::from_slice(&text)?)
}

/// Keeps a uniform sample of all passages that have enough words.
fn keep_question(kept: &mut Vec<Question>, text: &str, passages: usize, random: &mut Rng) {
    let place = if kept.len() < QUESTIONS { kept.len() } else { random.usize(..passages) };
    if place >= QUESTIONS {
        return;
    }
    let Some(question) = question(text, random) else { return };
    if place == kept.len() {
        kept.push(question);
    } else {
        kept[place] = question;
    }
}

fn question(text: &str, random: &mut Rng) -> Option<Question> {
    // As tantivy's default tokenizer has them.
    let words: Vec<String> = text
        .split(|character: char| !character.is_alphanumeric())
        .filter(|word| !word.is_empty())
        .map(str::to_lowercase)
        .collect();
    let is_word = |word: &&String| {
        (3..=20).contains(&word.len()) && word.bytes().all(|byte| byte.is_ascii_alphabetic())
    };
    let mut distinct: Vec<&String> = words.iter().filter(is_word).collect();
    distinct.sort_unstable();
    distinct.dedup();
    random.shuffle(&mut distinct);
    let [first, second, third, ..] = distinct[..] else { return None };
    let start = random.usize(..words.len());
    let pairs = words.windows(2).cycle().skip(start).take(words.len());
    let pair = pairs.into_iter().find(|pair| pair.iter().all(|word| is_word(&word)))?;
    let phrase = [pair[0].clone(), pair[1].clone()];
    Some(Question { words: [first.clone(), second.clone(), third.clone()], phrase })
}

fn size_of(folder: &Path) -> anyhow::Result<u64> {
    let mut size_bytes = 0;
    for entry in fs::read_dir(folder)? {
        // A file may be deleted meanwhile.
        size_bytes += entry?.metadata().map_or(0, |found| found.len());
    }
    Ok(size_bytes)
}

/// Drops a file from the page cache: pages are charged to the group that reads them first.
fn forget(path: &Path) -> anyhow::Result<()> {
    let file = File::open(path)?;
    file.sync_all()?;
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_has_words_of_its_passage() {
        let text = "The quick-brown fox, 42 jumps over the lazy dog";
        let found = question(text, &mut Rng::with_seed(1)).unwrap();
        let text = text.to_lowercase();
        assert!(found.words.iter().all(|word| text.contains(word.as_str())), "{found:?}");
        let [first, second] = &found.phrase;
        assert!(text.contains(&format!("{first} {second}")) || text.contains("quick-brown"));
        assert!(question("no 1 2 3", &mut Rng::with_seed(1)).is_none());
    }
}
