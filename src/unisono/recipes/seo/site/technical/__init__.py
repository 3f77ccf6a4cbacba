"""Technical checks of a site: indexing, canonical URLs, hreflang, structured data, redirects, links and sitemaps."""
