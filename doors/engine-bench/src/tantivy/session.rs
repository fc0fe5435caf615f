//! The child's side: one open index, and one round of one work at a time.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::ensure;
use bifolio::Cache;
use bifolio_bench::Membership;
use bifolio_tantivy::BifolioDirectory;
use serde::{Deserialize, Serialize};
use tantivy::collector::TopDocs;
use tantivy::directory::MmapDirectory;
use tantivy::query::{BooleanQuery, Occur, PhraseQuery, Query, TermQuery};
use tantivy::schema::{IndexRecordOption, Value};
use tantivy::{Index, ReloadPolicy, Searcher, TantivyDocument, Term};

use super::data::{self, Fields, Question};
use crate::rounds::{RoundCost, cost_of};

const TOP: usize = 10;
/// Decompressed blocks of stored fields that tantivy keeps per segment: memory outside of both
/// caches. Its default is 100.
const STORE_BLOCKS: usize = 10;

/// How `MmapDirectory` advises the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
pub(crate) enum Madvise {
    /// Not at all, which is its default.
    Normal,
    /// `MADV_RANDOM`.
    Random,
}

/// An index to open, and the memory to do it with.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Opening {
    pub(super) folder: PathBuf,
    /// Bound of the cache; `None` is `MmapDirectory`.
    pub(super) cache_bytes: Option<u64>,
    pub(super) madvise: Madvise,
    pub(super) group: Option<Membership>,
}

/// Kind of queries that a round measures. All read the stored fields of the 10 best documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Work {
    /// A term, a phrase, the conjunction of two terms, and the disjunction of three, in turn.
    Query,
    Term,
    Phrase,
}

/// One round.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Round {
    pub(super) work: Work,
    pub(super) seconds: f64,
    pub(super) seed: u64,
}

/// An open index.
pub(super) struct Session {
    group: Option<Membership>,
    searcher: Searcher,
    fields: Fields,
    questions: Vec<Question>,
    /// Keeps the cache's background threads.
    _cache: Option<Cache>,
}

impl Session {
    /// Joins the control group and opens the index.
    pub(super) fn open(opening: Opening) -> anyhow::Result<Self> {
        if let Some(group) = &opening.group {
            group.join()?;
        }
        let questions = data::questions(&opening.folder)?;
        let (index, cache) = match opening.cache_bytes {
            Some(bytes) => {
                let cache = Cache::builder().memory(bytes).build()?;
                let directory = BifolioDirectory::open(&opening.folder, &cache)?;
                (Index::open(directory)?, Some(cache))
            }
            None if opening.madvise == Madvise::Random => {
                let advice = tantivy::directory::Advice::Random;
                let directory = MmapDirectory::open_with_madvice(&opening.folder, advice)?;
                (Index::open(directory)?, None)
            }
            None => (Index::open(MmapDirectory::open(&opening.folder)?)?, None),
        };
        let reader = index.reader_builder().reload_policy(ReloadPolicy::Manual);
        let searcher = reader.doc_store_cache_num_blocks(STORE_BLOCKS).try_into()?.searcher();
        let fields = data::fields();
        Ok(Self { group: opening.group, searcher, fields, questions, _cache: cache })
    }

    /// Runs a round.
    pub(super) fn run_round(&mut self, round: Round) -> anyhow::Result<RoundCost> {
        let mut number = fastrand::Rng::with_seed(round.seed).usize(..self.questions.len());
        let mut latencies = Vec::new();
        let work = |until| {
            let mut verified_bytes = 0;
            while Instant::now() < until || latencies.is_empty() {
                let question = &self.questions[number % self.questions.len()];
                let begin = Instant::now();
                verified_bytes += self.ask(round.work, number, question)?;
                latencies.push(begin.elapsed().as_nanos() as u64);
                number += 1;
            }
            Ok((latencies.len() as u64, verified_bytes))
        };
        let cost = cost_of(round.seconds, self.group.as_ref(), work)?;
        Ok(RoundCost { latencies, ..cost })
    }

    /// Asks a question and reads the stored fields of the best documents, which must have its words
    /// (an error otherwise). Returns the number of bytes compared.
    fn ask(&self, work: Work, number: usize, question: &Question) -> anyhow::Result<u64> {
        let mut verified_bytes = 0;
        let [first, second, third] = &question.words;
        let (query, must_have): (Box<dyn Query>, Vec<&String>) = match (work, number % 4) {
            (Work::Term, _) | (Work::Query, 0) => (Box::new(self.term(first)), vec![first]),
            (Work::Phrase, _) | (Work::Query, 1) => {
                let terms = question.phrase.iter().map(|word| self.word(word)).collect();
                (Box::new(PhraseQuery::new(terms)), question.phrase.iter().collect())
            }
            (Work::Query, 2) => {
                (Box::new(self.boolean(Occur::Must, &[first, second])), vec![first, second])
            }
            (Work::Query, _) => {
                (Box::new(self.boolean(Occur::Should, &[first, second, third])), vec![])
            }
        };
        let found = self.searcher.search(&query, &TopDocs::with_limit(TOP).order_by_score())?;
        ensure!(!found.is_empty(), "no document has {question:?}");
        for (_, address) in found {
            let document: TantivyDocument = self.searcher.doc(address)?;
            let text = document.get_first(self.fields.text).and_then(|text| text.as_str());
            let text = text.unwrap_or_default().to_lowercase();
            let has_all = must_have.iter().all(|word| text.contains(&***word));
            ensure!(has_all && !text.is_empty(), "a document found for {question:?} is {text:?}");
            verified_bytes += text.len() as u64;
        }
        Ok(verified_bytes)
    }

    fn word(&self, word: &str) -> Term {
        Term::from_field_text(self.fields.text, word)
    }

    fn term(&self, word: &str) -> TermQuery {
        TermQuery::new(self.word(word), IndexRecordOption::WithFreqs)
    }

    fn boolean(&self, occur: Occur, words: &[&String]) -> BooleanQuery {
        let clause = |word: &&String| (occur, Box::new(self.term(word)) as Box<dyn Query>);
        BooleanQuery::new(words.iter().map(clause).collect())
    }
}
