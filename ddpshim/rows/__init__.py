"""Row tensors: tensors with the shape of the whole batch, of which each rank holds a block of rows."""
