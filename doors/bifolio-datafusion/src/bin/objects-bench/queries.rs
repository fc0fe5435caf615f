//! The queries of DataFusion.

use std::sync::Arc;

use anyhow::Result;
use bifolio_datafusion::queries::{QUERIES, TABLES_URL, answer, register_tables};
use bifolio_datafusion::tables;
use datafusion::prelude::SessionContext;
use object_store::ObjectStore;
use url::Url;

/// Queries in a run.
pub(crate) const COUNT: usize = QUERIES.len();

/// A session over a store.
pub(crate) struct Queries {
    context: SessionContext,
    has_tables: bool,
}

impl Queries {
    pub(crate) fn new(store: Arc<dyn ObjectStore>) -> Result<Self> {
        let context = SessionContext::new();
        context.register_object_store(&Url::parse(TABLES_URL)?, store);
        Ok(Self { context, has_tables: false })
    }

    /// Runs all queries once, the first time with the registration of the tables, and calls
    /// `answered` after each. Returns the answers.
    pub(crate) async fn run(&mut self, answered: impl Fn()) -> Result<Vec<String>> {
        if !self.has_tables {
            register_tables(&self.context).await?;
            self.has_tables = true;
        }
        let mut answers = Vec::new();
        for (_, query) in QUERIES {
            answers.push(answer(&self.context, query).await?);
            answered();
        }
        Ok(answers)
    }
}

/// Creates the tables of the queries in `store`.
pub(crate) async fn create_tables(store: &dyn ObjectStore, files: u64, rows: u64) -> Result<()> {
    tables::create(store, files, rows).await?;
    Ok(())
}
