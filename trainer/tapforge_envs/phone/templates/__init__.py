"""The standard suite's task templates, by the app they are about; `across` needs several apps."""
